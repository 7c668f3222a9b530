"""Stock Trino over Seamark's plans: a proxy of its client protocol that puts plan tables in the place of tables."""
