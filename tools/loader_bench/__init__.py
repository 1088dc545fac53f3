"""What bench_loader.py measures: subjects, their files, and what takes a process of its own."""
