"""HTTP: connections, requests, routes and their answers."""
