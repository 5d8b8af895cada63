//! The addresses at which other hosts reach this one.

use pushgate::settings::PluginSettings;
use pushgate_door::addresses::{Offered, Wish, offer};

use crate::rdma::Rdma;
use crate::variables;

/// The addresses at which other hosts reach this one: the setting, or else those of interfaces, the RDMA device's first, if there is
/// one.
pub fn own_addresses(
    settings: &PluginSettings,
    sockets: &variables::Sockets,
    rdma: Option<&Rdma>,
) -> std::result::Result<Offered, String> {
    let own = rdma.map(|rdma| rdma.device.addresses()).unwrap_or_default();
    offer(&Wish {
        host: &settings.host,
        family: sockets.family,
        names: sockets.names.as_ref(),
        own: &own,
        node: rdma.and_then(|rdma| rdma.node),
    })
}
