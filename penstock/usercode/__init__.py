"""Code that users name: imported, called, guarded."""
