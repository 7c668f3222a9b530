"""The timeline: a log of instants. Clients read, watch and archive it, and webhooks receive it."""
