//! Libraries that are opened at run time: what the dynamic linker says about a failure.

/// The message of a library error with dlopen's own text, which libloading's message leaves out.
pub(crate) fn explain(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
