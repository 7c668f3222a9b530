"""Real services as processes: one file a service, each on 127.0.0.1 and a free port, each ending with its context.

The configuration files are those in `deploy/`, the very ones `docker-compose.yml` mounts, so that what the tests
prove is what an operator starts. Everything that is downloaded lies in `.cache/`, put there by make
targets, never by a test.
"""
