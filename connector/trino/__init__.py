"""Lets an unmodified Trino use Seamark's plans: a proxy of its client protocol replaces tables by their
plans.
"""
