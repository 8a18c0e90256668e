"""The gateway's metrics: :mod:`gateway.metrics.telemetry` has the whole, the other modules its parts."""
