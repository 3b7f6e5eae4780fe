"""Groups of rank processes: placed, started, talked to, watched, ended."""
