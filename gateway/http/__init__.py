"""The HTTP side: connections, bodies, the checks that refuse a request before it reaches a route, and the state of a request."""
