"""The web console: a static page that calls the server's own API from the browser.

``index.html`` is the page at ``/``; the files beside it are served below ``/console/`` by ``gateway/api/console.py``. There is
no build step: browsers load the ES modules as they are here.
"""
