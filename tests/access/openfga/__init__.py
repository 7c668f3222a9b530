"""Tests of the authorizer over OpenFGA."""
