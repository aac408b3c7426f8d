"""The management API over REST, with a module for each feature; ``routes.py`` lists the endpoints."""
