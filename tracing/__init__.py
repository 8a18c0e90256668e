"""Traces of requests, for gateway and engine: W3C trace context, spans, sampling, and their export in a thread.

:mod:`tracing.otlp` alone imports OpenTelemetry, and only where traces are exported. The other modules import nothing from outside
the standard library.
"""
