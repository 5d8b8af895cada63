//! Lists of network interfaces, read as NCCL reads them.

use std::fmt;

/// A list of interfaces as NCCL reads `NCCL_SOCKET_IFNAME`: `eth,ib0` are beginnings of names, `=eth0` whole names, `^docker` all but
/// these.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// For messages: variable and value.
    text: String,
    but: bool,
    whole: bool,
    names: Vec<String>,
}

impl Names {
    /// Reads the value of a variable; nothing where it names nothing.
    pub fn parse(variable: &str, value: &str) -> Option<Names> {
        let (but, rest) = value.strip_prefix('^').map_or((false, value), |rest| (true, rest));
        let (whole, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
        let names = rest.split(',').map(str::trim).filter(|name| !name.is_empty());
        // A port may follow, as in names of RDMA devices.
        let names: Vec<_> = names.map(|name| name.split(':').next().unwrap_or_default().to_owned()).collect();
        (!names.is_empty()).then(|| Names { text: format!("{variable}={value}"), but, whole, names })
    }

    fn position(&self, interface: &str) -> Option<usize> {
        let fits =
            |name: &String| if self.whole { interface == name } else { interface.starts_with(&**name) };
        self.names.iter().position(fits)
    }

    /// Whether the list lets this interface be taken.
    pub fn takes(&self, interface: &str) -> bool {
        self.position(interface).is_some() != self.but
    }

    /// Where in the list an interface stands; interfaces come in this order.
    pub(super) fn place(&self, interface: &str) -> usize {
        if self.but { 0 } else { self.position(interface).unwrap_or(usize::MAX) }
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
