"""From a batch to numbers: tensors in, one forward pass, results out."""
