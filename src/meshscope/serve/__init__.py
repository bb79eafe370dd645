"""The dashboard: runs below some folders, over HTTP, with the page's bundle and documents.

`app` is the web application, `analyst` makes every answer (in a process of its own, `worker`),
`feed` hands events of live runs to browsers. Nothing is computed for the dashboard alone.
"""
