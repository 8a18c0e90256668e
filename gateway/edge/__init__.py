"""The HTTP edge: connections, request heads and bodies, and what is refused before a route sees it."""
