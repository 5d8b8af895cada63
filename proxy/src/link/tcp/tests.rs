//! Two ends of a link over streams of memory, and over loopback.
