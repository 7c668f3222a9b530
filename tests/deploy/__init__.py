"""What is deployed: compose, its files, and the services that they configure."""
