"""What operators see: metrics, the access log and traces."""
