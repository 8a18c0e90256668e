"""Engine pods: discovery, HTTP client, health, and the choice of a replica for each request."""
