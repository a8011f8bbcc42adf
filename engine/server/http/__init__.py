"""HTTP: connections, who may ask, the routes, and answers as they are sent."""
