"""Tests of the routes that plan scans: pages, later answers, plan tables and views, joins, explanations."""
