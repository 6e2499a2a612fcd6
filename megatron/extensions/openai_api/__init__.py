"""Routes of the server in the form of OpenAI's API."""
