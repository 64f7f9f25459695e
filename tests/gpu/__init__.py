"""What only a GPU can prove. `run.sh` runs it; the parts that need none are tested with the others."""
