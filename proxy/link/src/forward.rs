//! Methods that only call the same method of another value.

/// Writes methods that call the same methods of a field, for a link that stands before another link and changes a few
/// calls: `forward_to!(inner; fn name(&self) -> &'static str; fn leave(&mut self););`.
#[macro_export]
macro_rules! forward_to {
    ($to:ident;) => {};
    ($to:ident; fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $result:ty)?; $($rest:tt)*) => {
        fn $name(&self $(, $arg: $type)*) $(-> $result)? {
            self.$to.$name($($arg),*)
        }
        $crate::forward_to!($to; $($rest)*);
    };
    ($to:ident; fn $name:ident(&mut self $(, $arg:ident: $type:ty)*) $(-> $result:ty)?; $($rest:tt)*) => {
        fn $name(&mut self $(, $arg: $type)*) $(-> $result)? {
            self.$to.$name($($arg),*)
        }
        $crate::forward_to!($to; $($rest)*);
    };
}
