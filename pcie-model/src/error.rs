//! The error of this crate: a parameter that is not allowed.

/// A parameter that is not allowed: its name, its value and the allowed values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {value}, expected {allowed}")]
pub struct ParameterError {
    /// The parameter's name, as its field is called.
    pub name: &'static str,
    /// The value that was given.
    pub value: String,
    /// The values that are allowed.
    pub allowed: String,
}

/// The result of every function of this crate that checks its parameters.
pub type Result<T, E = ParameterError> = std::result::Result<T, E>;

impl ParameterError {
    pub(crate) fn new(name: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        ParameterError { name, value: value.to_string(), allowed: allowed.into() }
    }
}

/// Accepts `value` if it is one of `allowed`.
pub(crate) fn one_of(name: &'static str, value: u32, allowed: &[u32]) -> Result<()> {
    if allowed.contains(&value) {
        return Ok(());
    }
    let list: Vec<String> = allowed.iter().map(u32::to_string).collect();
    Err(ParameterError::new(name, value, format!("one of {}", list.join(", "))))
}

/// Accepts `value` if it lies in the range, ends included.
pub(crate) fn within(name: &'static str, value: f64, low: f64, high: f64) -> Result<()> {
    if value.is_finite() && (low..=high).contains(&value) {
        return Ok(());
    }
    Err(ParameterError::new(name, value, format!("{low} to {high}")))
}
