"""Lets an unmodified Trino use Seamark's plans: a proxy of Trino's client protocol puts plans into statements."""
