"""From a socket to an endpoint: the application, what every request passes, limits, TLS, operators' endpoints."""
