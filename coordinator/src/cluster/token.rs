//! Invitations: the coordinator's half of join tokens.
//!
//! Only a hash of the secret is stored, with its expiry and the uses left.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use shimmer_node::token::Token;

/// One invitation as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Invitation {
    /// BLAKE3 of the secret, hexadecimal.
    secret_hash: String,
    /// Seconds since 1970.
    expires_unix: u64,
    /// Nodes that may still join with it.
    uses_left: u32,
}

/// Dead invitations are kept this long, so that a late user is told why.
const KEEP_DEAD_SECONDS: u64 = 30 * 24 * 3600;

/// Makes a token and what is stored of it.
pub(super) fn new_invitation(
    ca_der: Vec<u8>,
    advertise: &[SocketAddr],
    valid_for: Duration,
    uses: u32,
) -> Result<(Token, Invitation), String> {
    let mut secret = [0u8; 32];
    getrandom::fill(&mut secret).map_err(|e| format!("the system gives no random numbers: {e}"))?;
    let expires_unix = now_unix().saturating_add(valid_for.as_secs());
    let invitation = Invitation { secret_hash: hash(&secret), expires_unix, uses_left: uses };
    let addresses = advertise.iter().map(ToString::to_string).collect();
    Ok((Token { secret, expires_unix, ca_der, addresses }, invitation))
}

/// Uses an invitation up by one.
///
/// # Errors
/// One sentence for the node's owner.
pub(super) fn redeem(invitations: &mut [Invitation], secret: &[u8]) -> Result<(), String> {
    let wanted = hash(secret);
    let Some(invitation) = invitations.iter_mut().find(|i| i.secret_hash == wanted) else {
        return Err(
            "this cluster did not make that join token; make a new one with `shimmer cluster invite`"
                .to_owned(),
        );
    };
    if invitation.expires_unix <= now_unix() {
        return Err("the join token has expired; make a new one with `shimmer cluster invite`".to_owned());
    }
    let Some(left) = invitation.uses_left.checked_sub(1) else {
        return Err(
            "the join token has been used up; make a new one with `shimmer cluster invite`".to_owned()
        );
    };
    invitation.uses_left = left;
    Ok(())
}

/// Drops invitations that have been dead for long.
pub(super) fn forget_dead(invitations: &mut Vec<Invitation>) {
    let now = now_unix();
    invitations.retain(|i| i.expires_unix.saturating_add(KEEP_DEAD_SECONDS) > now);
}

fn hash(secret: &[u8]) -> String {
    blake3::hash(secret).to_hex().to_string()
}

fn now_unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invitations_are_used_up_and_expire() {
        let (token, stored) = new_invitation(vec![1], &[], Duration::from_secs(60), 2).unwrap();
        assert!(
            !serde_json::to_string(&stored)
                .unwrap()
                .contains(&token.secret.iter().map(|b| format!("{b:02x}")).collect::<String>())
        );
        let mut all = vec![stored];
        assert!(redeem(&mut all, &[0; 32]).unwrap_err().contains("did not make"));
        assert!(redeem(&mut all, &token.secret).is_ok());
        assert!(redeem(&mut all, &token.secret).is_ok());
        assert!(redeem(&mut all, &token.secret).unwrap_err().contains("used up"));

        let (token, stored) = new_invitation(vec![1], &[], Duration::ZERO, 1).unwrap();
        let mut all = vec![stored];
        assert!(redeem(&mut all, &token.secret).unwrap_err().contains("expired"));
        forget_dead(&mut all);
        assert_eq!(all.len(), 1, "kept for a while, to explain");
    }
}
