"""The HTTP service: a model behind a JSON API, with a web page to try it."""
