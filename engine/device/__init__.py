"""Work on the device that knows no request: copies, sampling, CUDA graphs; and the limits of the machine."""
