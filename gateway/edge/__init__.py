"""The HTTP edge: connections, request heads and bodies, and the checks that refuse a request before it reaches a route."""
