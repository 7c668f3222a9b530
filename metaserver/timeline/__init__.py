"""Instants: what happened to a table, when, by whom; read since, watched, archived, sent to webhooks."""
