"""Images of requests: decoding, resizing, patches, data URLs and fetching."""
