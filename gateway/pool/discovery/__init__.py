"""Where the engines are. Each source follows one entry of the setting ``engines`` and never gives up."""
