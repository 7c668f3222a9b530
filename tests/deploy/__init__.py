"""Tests of the deployment: compose, its files, and the services that they configure."""
