"""Running a trained model: sampling, generation."""
