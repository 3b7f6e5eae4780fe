"""What a flow run of Prefect is called and shows of its training, and how it fails."""
