"""The HTTP service, which offers a model as a JSON API, with a web page to try it."""
