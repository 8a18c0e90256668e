"""What one client may take, and how much the gateway takes on at all."""
