"""Tests of the routes that plan scans: pages, delayed plans, plan tables and views, joins, explanations."""
