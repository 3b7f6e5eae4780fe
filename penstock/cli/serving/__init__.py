"""Commands that serve a trained model, and put load on a server."""
