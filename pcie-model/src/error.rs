//! The one error of this crate: a parameter that cannot be.

/// A parameter that is not allowed: which, what it was, what it may be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {value}, allowed is {allowed}")]
pub struct ParameterError {
    /// The parameter, as its field is called.
    pub name: &'static str,
    /// What it was.
    pub value: String,
    /// What it may be.
    pub allowed: String,
}

/// The result of everything here that checks its parameters.
pub type Result<T, E = ParameterError> = std::result::Result<T, E>;

impl ParameterError {
    pub(crate) fn new(name: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        ParameterError { name, value: value.to_string(), allowed: allowed.into() }
    }
}

/// `Ok` where `value` is one of `allowed`.
pub(crate) fn one_of(name: &'static str, value: u32, allowed: &[u32]) -> Result<()> {
    if allowed.contains(&value) {
        return Ok(());
    }
    let list: Vec<String> = allowed.iter().map(u32::to_string).collect();
    Err(ParameterError::new(name, value, format!("one of {}", list.join(", "))))
}

/// `Ok` where `value` lies in the range, ends included.
pub(crate) fn within(name: &'static str, value: f64, low: f64, high: f64) -> Result<()> {
    if value.is_finite() && (low..=high).contains(&value) {
        return Ok(());
    }
    Err(ParameterError::new(name, value, format!("{low} to {high}")))
}
