"""Tests of the routes that plan scans: pages, plans that are answered later, plan tables and views, joins,
explanations.
"""
