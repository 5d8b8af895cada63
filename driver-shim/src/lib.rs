//! What a window is and where it comes from, and the one ABI that everyone
//! who shares memory with us speaks.

#[allow(missing_docs, non_camel_case_types, non_upper_case_globals)]
pub mod abi;
pub mod record;
