"""Code that endpoints share: reading a body, running its request, answering."""
