"""Tests of the authorizer over Open Policy Agent."""
