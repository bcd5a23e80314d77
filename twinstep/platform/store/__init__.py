"""What the control plane remembers: jobs, runs, events and metrics, in SQLite or PostgreSQL. Starts nothing."""
