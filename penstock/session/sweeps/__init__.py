"""What a sweep does: its trainings planned and checked, their GPUs, and a process for each."""
