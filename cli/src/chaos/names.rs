//! What the supervisor of a run and its children call each other.

/// How a child knows what it is: `RANK/PARENT/NUMBER` or `proxy/PARENT/NUMBER`, PARENT being the supervisor's process and NUMBER
/// counting how often the ranks were started.
pub const ROLE: &str = "_PUSHGATE_CHAOS_ROLE";
/// The run's seed, for the children.
pub const SEED: &str = "_PUSHGATE_CHAOS_SEED";

/// The name of the ranks' job.
pub fn job(parent: u32, number: u32) -> String {
    format!("chaos-{parent}-{number}")
}

/// The socket of the ranks' proxy.
pub fn proxy_socket(parent: u32, number: u32) -> String {
    format!("@pushgate-chaos-{parent}-{number}")
}
