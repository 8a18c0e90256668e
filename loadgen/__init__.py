"""Load generator for servers with the API of ``docs/api.md``: sends requests on a schedule, records each one, and reports.

It is an ordinary client: it depends on the API's JSON and not on the programs that serve it.
"""
