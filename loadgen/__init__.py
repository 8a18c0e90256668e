"""Load for a server that speaks the API of ``docs/api.md``: sent on a schedule, recorded request by request, reported.

A client like any other: it knows the API's JSON and nothing of the programs that answer it.
"""
